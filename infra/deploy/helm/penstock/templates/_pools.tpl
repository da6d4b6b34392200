{{/*
The pools of workers with everything decided, into the dict "pools": (dict "root" $ "pools" $pools).
GPUs come from the engine arguments, as the engines count them.
*/}}
{{- define "penstock.pools" -}}
{{- $root := .root -}}
{{- $given := $root.Values.workers | default (dict "aggregated" (dict)) -}}
{{- range $name, $own := $given -}}
{{- if has $name (list "gateway" "router" "streams" "planner" "trace" "profiles" "broker" "nats" "engine" "scripts" "ssh" "hub" "models") -}}
{{- fail (printf "workers.%s: the name is taken; choose another one" $name) -}}
{{- end -}}
{{- $pool := mustMergeOverwrite (deepCopy $root.Values.workerDefaults) (deepCopy ($own | default dict)) -}}
{{- $roles := list "aggregated" "prefill" "decode" "encode" "diffusion" "embed" -}}
{{- $role := $pool.role | default (ternary $name "aggregated" (has $name $roles)) -}}
{{- $apart := has $role (list "diffusion" "embed") -}}
{{- $external := has $pool.engine (list "trtllm" "vllm" "sglang") -}}
{{- $images := dict "mock" $root.Values.image "native" $root.Values.nativeImage -}}
{{- $image := $pool.image | default (get $images $pool.engine) | default $root.Values.engineImage -}}
{{- if not $image -}}
{{- fail (printf "engineImage: name the image with penstock and %s; see docs/containers.md" $pool.engine) -}}
{{- end -}}
{{- $model := $pool.model | default (ternary "" $root.Values.model $apart) -}}
{{- if and (not $model) (or $external $apart) -}}
{{- fail (printf "workers.%s.model: name a directory on the models volume (/models/...) or a Hugging Face id" $name) -}}
{{- end -}}
{{- $ownModel := and (not $apart) $pool.model (ne $pool.model $root.Values.model) | not | not -}}
{{- $served := $pool.servedModelName | default (ternary "" $root.Values.servedModelName (or $apart $ownModel)) -}}
{{- $names := list -}}
{{- range splitList " " (replace "," " " $served) }}{{- if . }}{{- $names = append $names . }}{{- end }}{{- end -}}
{{- $canonical := ternary (base $model) ($model | default "demo") (hasPrefix "/" $model) -}}
{{- if $names }}{{- $canonical = first $names }}{{- end -}}
{{- if and $pool.engineArgs (not $external) -}}
{{- fail (printf "workers.%s.engineArgs: read by trtllm, vllm and sglang, not by %s" $name $pool.engine) -}}
{{- end -}}
{{- $nodes := int $pool.nodes -}}
{{- if and (gt $nodes 1) (not $external) -}}
{{- fail (printf "workers.%s.nodes: %d; only trtllm, vllm and sglang run one engine over several nodes" $name $nodes) -}}
{{- end -}}
{{- /* TensorRT-LLM's ranks are started by the leader; the pods of other engines find each other. */ -}}
{{- $mpi := and (gt $nodes 1) (eq $pool.engine "trtllm") -}}
{{- $total := 0 -}}
{{- if $external -}}
{{- $total = 1 -}}
{{- $arguments := fromYaml ($pool.engineArgs | default "{}") -}}
{{- if hasKey $arguments "Error" -}}
{{- fail (printf "workers.%s.engineArgs: %s" $name $arguments.Error) -}}
{{- end -}}
{{- $parallel := dict -}}
{{- $_ := set $parallel "trtllm" (list "tensor_parallel_size" "pipeline_parallel_size" "context_parallel_size" "world_size") -}}
{{- $_ := set $parallel "vllm" (list "tensor_parallel_size" "pipeline_parallel_size" "data_parallel_size") -}}
{{- $_ := set $parallel "sglang" (list "tp_size" "pp_size" "dp_size") -}}
{{- $sizes := get $parallel $pool.engine -}}
{{- $arguments = mergeOverwrite (dict (first $sizes) (get $pool.settings "tensor-parallel-size" | default 1)) $arguments -}}
{{- range $sizes -}}
{{- $total = mul $total (get $arguments . | default 1 | int) -}}
{{- end -}}
{{- else if eq $pool.engine "native" -}}
{{- $total = 1 -}}
{{- end -}}
{{- $gpus := int (div (sub (add $total $nodes) 1) $nodes) -}}
{{- if not (kindIs "invalid" $pool.gpus) -}}
{{- $gpus = int $pool.gpus -}}
{{- end -}}
{{- if and $external (ne (mul $gpus $nodes) (int $total)) -}}
{{- fail (printf "workers.%s.gpus: %d x %d nodes, the engine's arguments ask for %d" $name $gpus $nodes (int $total)) -}}
{{- end -}}
{{- if or $pool.nvlinkDomain $pool.topologyKey -}}
{{- if eq $nodes 1 -}}
{{- fail (printf "workers.%s: nvlinkDomain and topologyKey are for engines of several nodes" $name) -}}
{{- end -}}
{{- end -}}
{{- $readOnly := not $external -}}
{{- if kindIs "bool" $pool.readOnlyRootFilesystem -}}
{{- $readOnly = $pool.readOnlyRootFilesystem -}}
{{- end -}}
{{- $decided := dict "ownModel" $ownModel "apart" $apart "names" $names "canonical" $canonical "role" $role "image" $image "model" $model "nodes" $nodes "mpi" $mpi "gpus" $gpus "external" $external "readOnlyRootFilesystem" $readOnly -}}
{{- range $cell := until (int $root.Values.cells.count) -}}
{{- $own := include "penstock.inCell" (dict "name" $name "cell" $cell) -}}
{{- if or (has $own (list "gateway" "router")) (hasKey $.pools $own) (and $cell (hasKey $given $own)) -}}
{{- fail (printf "workers.%s: pool %s has this name in cell %d; choose another one" $own $name $cell) -}}
{{- end -}}
{{- $_ := set $.pools $own (mergeOverwrite (deepCopy $pool) $decided (dict "cell" $cell)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
The language models of all pools by name, each with "model" and "names", into the dict "texts": (dict "root" $ "texts" $texts).
*/}}
{{- define "penstock.texts" -}}
{{- $pools := dict -}}
{{- include "penstock.pools" (dict "root" .root "pools" $pools) -}}
{{- range $name, $pool := $pools -}}
{{- if not $pool.apart -}}
{{- $known := get $.texts $pool.canonical | default dict -}}
{{- if and $known (ne $known.model $pool.model) -}}
{{- fail (printf "workers.%s: %s and %s would both be called %s; give one a servedModelName of its own" $name ($known.model | default "the demo model") $pool.model $pool.canonical) -}}
{{- end -}}
{{- $_ := set $.texts $pool.canonical (dict "model" $pool.model "names" (concat ($known.names | default list) $pool.names | uniq)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The longest that a model may take to load: gateways are ready only when a worker serves. */}}
{{- define "penstock.patience" -}}
{{- $pools := dict -}}
{{- include "penstock.pools" (dict "root" . "pools" $pools) -}}
{{- $longest := 0 -}}
{{- range $pools }}{{- $longest = max $longest (int .loadSeconds) -}}{{- end -}}
{{- add $longest 600 -}}
{{- end }}

{{/* "true": some pool may have no worker while nobody asks for its model. */}}
{{- define "penstock.toZero" -}}
{{- $pools := dict -}}
{{- include "penstock.pools" (dict "root" . "pools" $pools) -}}
{{- range $pools -}}
{{- if and .autoscaling.enabled (eq (int .autoscaling.minReplicas) 0) }}true{{ break }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Resources of each pod of an engine: (dict "pool" $pool). */}}
{{- define "penstock.resources" -}}
{{- $extended := dict -}}
{{- if .pool.gpus }}{{- $_ := set $extended "nvidia.com/gpu" (toString .pool.gpus) -}}{{- end -}}
{{- range $name, $count := .pool.resources }}{{- $_ := set $extended $name (include "penstock.number" $count) -}}{{- end -}}
requests:
  cpu: {{ .pool.cpu | quote }}
  memory: {{ .pool.memory }}
  {{- range $name, $count := $extended }}
  {{ $name }}: {{ $count | quote }}
  {{- end }}
limits:
  memory: {{ .pool.memory }}
  {{- range $name, $count := $extended }}
  {{ $name }}: {{ $count | quote }}
  {{- end }}
{{- if .pool.nvlinkDomain }}
claims: [{name: nvlink}]
{{- end }}
{{- end }}

{{/* Arguments of a worker: (dict "root" $ "name" $name "pool" $pool). */}}
{{- define "penstock.workerArguments" -}}
- worker
{{ include "penstock.common" (dict "root" .root "cell" .pool.cell) }}
- --role={{ .pool.role }}
- --engine={{ .pool.engine }}
{{- with .pool.model }}
- --model={{ . }}
{{- end }}
{{- with .pool.names }}
- {{ printf "--served-model-name=%s" (join "," .) | quote }}
{{- end }}
- --block-size={{ include "penstock.number" .root.Values.blockSize }}
{{- if .pool.engineArgs }}
- --extra-engine-args=/etc/penstock/engine/{{ .name }}.yaml
{{- end }}
- --drain-s={{ include "penstock.number" .pool.drainSeconds }}
{{- if not .pool.mpi }}
- --clear-shm
{{- end }}
- "--metrics-host=::"
- --metrics-port={{ include "penstock.metrics" . }}
{{- if and (gt .pool.nodes 1) (not .pool.mpi) }}
- --nodes={{ .pool.nodes }}
- --node-rank=$(LWS_WORKER_INDEX)
- --leader-address=$(LWS_LEADER_ADDRESS)
{{- end }}
{{- include "penstock.settings" .pool.settings }}
{{- end }}

{{/* The pod of a pool: alone or the leader, or one that only computes ("follower" true). */}}
{{- define "penstock.workerPod" -}}
{{- $pool := .pool -}}
metadata:
  {{- include "penstock.podMeta" (dict "root" .root "component" (printf "%s%s" .name (ternary "-ranks" "" .follower)) "spec" $pool) | nindent 2 }}
  {{- if $pool.engineArgs }}
  {{- if not $pool.podAnnotations }}
  annotations:
  {{- end }}
    # a change of the arguments starts new engines
    checksum/engine-arguments: {{ sha256sum $pool.engineArgs | trunc 16 | quote }}
  {{- end }}
spec:
  {{- include "penstock.pod" (dict "root" .root "spec" $pool) | nindent 2 }}
  {{- if or $pool.tolerations $pool.gpus }}
  tolerations:
    {{- if $pool.gpus }}
    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with $pool.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add (int $pool.drainSeconds) (include "penstock.grace" . | int) }}
  containers:
    - name: {{ ternary "ranks" "worker" .follower }}
      image: {{ $pool.image }}
      imagePullPolicy: {{ .root.Values.imagePullPolicy }}
      {{- if and .follower $pool.mpi }}
      command: [bash, /etc/penstock/scripts/follow.sh]
      {{- else if $pool.mpi }}
      command:
        - bash
        - /etc/penstock/scripts/lead.sh
        - {{ $pool.gpus | quote }}
        - penstock
        {{- include "penstock.workerArguments" . | nindent 8 }}
      {{- else }}
      args:
        {{- include "penstock.workerArguments" . | nindent 8 }}
      {{- end }}
      env:
        {{- if .follower }}
        - {name: HOME, value: /home/penstock}
        {{- else }}
        {{- include "penstock.ownName" . | nindent 8 }}
        {{- include "penstock.url" (dict "root" .root "user" "worker" "cell" $pool.cell) | nindent 8 }}
        # on a volume that outlives the container: the next one reports whether this one crashed
        - {name: PENSTOCK_STATE_DIR, value: /tmp/penstock}
        {{- end }}
        - {name: HF_HOME, value: /models/hub}
        {{- include "penstock.hub" .root | nindent 8 }}
        {{- if $pool.mpi }}
        - {name: SSH_PORT, value: {{ include "penstock.ssh" . | quote }}}
        - {name: SSH_KEYS, value: /etc/penstock/ssh}
        # the ranks' own metrics, of which each pod shows those of its ranks
        - {name: PROMETHEUS_MULTIPROC_DIR, value: /tmp/metrics}
        {{- if .follower }}
        - {name: METRICS_PORT, value: {{ include "penstock.metrics" . | quote }}}
        {{- end }}
        {{- end }}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if and .follower $pool.mpi }}
        - {name: ssh, containerPort: {{ include "penstock.ssh" . }}}
        {{- end }}
        - {name: metrics, containerPort: {{ include "penstock.metrics" . }}}
      {{- if and .follower $pool.mpi }}
      readinessProbe: {tcpSocket: {port: ssh}, periodSeconds: 10}
      {{- else if .follower }}
      readinessProbe: {httpGet: {path: /metrics, port: metrics}, periodSeconds: 10, timeoutSeconds: 5}
      {{- else }}
      # The page is there once the model is loaded; until then only the time is limited.
      startupProbe:
        httpGet: {path: /metrics, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div (add (int $pool.loadSeconds) 9) 10 }}
      livenessProbe: {httpGet: {path: /metrics, port: metrics}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {httpGet: {path: /metrics, port: metrics}, periodSeconds: 10, timeoutSeconds: 5}
      {{- end }}
      resources:
        {{- include "penstock.resources" . | nindent 8 }}
      securityContext:
        runAsNonRoot: true
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: {{ $pool.readOnlyRootFilesystem }}
        seccompProfile: {type: RuntimeDefault}
        capabilities: {drop: [ALL]}
      volumeMounts:
        {{- include "penstock.scratchMounts" . | nindent 8 }}
        - {name: models, mountPath: /models}
        - {name: shm, mountPath: /dev/shm}
        {{- if not .follower }}
        {{- include "penstock.loginMounts" (dict "root" .root "users" (list "worker")) | trim | nindent 8 }}
        {{- end }}
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if $pool.engineArgs }}
        - {name: engine, mountPath: /etc/penstock/engine, readOnly: true}
        {{- end }}
        {{- if $pool.mpi }}
        - {name: scripts, mountPath: /etc/penstock/scripts, readOnly: true}
        - {name: ssh, mountPath: /etc/penstock/ssh, readOnly: true}
        {{- end }}
  volumes:
    {{- include "penstock.scratch" . | nindent 4 }}
    {{- include "penstock.models" .root | nindent 4 }}
    # TensorRT-LLM and NCCL exchange through shared memory, of which a container has 64 MiB otherwise.
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $pool.sharedMemory }}}}
    {{- if not .follower }}
    {{- include "penstock.login" (dict "root" .root "users" (list "worker")) | trim | nindent 4 }}
    {{- end }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $pool.engineArgs }}
    - {name: engine, configMap: {name: {{ .root.Release.Name }}-engine}}
    {{- end }}
    {{- if $pool.mpi }}
    - {name: scripts, configMap: {name: {{ .root.Release.Name }}-scripts}}
    - {name: ssh, secret: {secretName: {{ .root.Release.Name }}-ssh, defaultMode: 0440}}
    {{- end }}
  {{- if $pool.nvlinkDomain }}
  resourceClaims:
    - {name: nvlink, resourceClaimTemplateName: {{ .root.Release.Name }}-{{ .name }}-nvlink}
  {{- end }}
{{- end }}
