{{/* Ports, paths and times that several templates share. */}}
{{- define "penstock.http" }}8000{{ end }}
{{- define "penstock.metrics" }}9090{{ end }}
{{- define "penstock.ssh" }}2222{{ end }}
{{- define "penstock.nats" }}4222{{ end }}
{{/* Beyond drainSeconds: to close connections and unregister. */}}
{{- define "penstock.grace" }}15{{ end }}
{{/* Before SIGTERM: proxies still send requests to a pod that has just been taken out of its Service. */}}
{{- define "penstock.unlisted" }}5{{ end }}

{{/* of (dict "root" $ "component" "gateway") */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "penstock.meta" -}}
name: {{ .root.Release.Name }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- end }}

{{/* A number as a flag takes it, whether helm read it as an integer or as a float. */}}
{{- define "penstock.number" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* Settings as arguments. null leaves one out. */}}
{{- define "penstock.settings" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $name (join "," $value) | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $name (include "penstock.number" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* What all processes are told. */}}
{{- define "penstock.common" -}}
- --namespace={{ .Values.namespace }}
- --log-format=json
- --log-level={{ .Values.logLevel }}
{{- end }}

{{/* As the NATS chart names its Service. */}}
{{- define "penstock.natsHost" -}}
{{- $name := .Values.nats.nameOverride | default "nats" -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{ .Values.nats.fullnameOverride | default $full | trunc 63 | trimSuffix "-" }}.{{ .Release.Namespace }}
{{- end }}

{{/* The variable with the URL of a user: (dict "root" $ "user" "gateway" "variable" "PENSTOCK_NATS_URL"). */}}
{{- define "penstock.url" -}}
{{- if .root.Values.nats.enabled -}}
{{- $password := printf "%s_PASSWORD" (upper .user) -}}
- name: {{ $password }}
  valueFrom: {secretKeyRef: {name: {{ .root.Release.Name }}-broker, key: {{ .user }}}}
- name: {{ .variable }}
  value: nats://{{ .user }}:$({{ $password }})@{{ include "penstock.natsHost" .root }}:{{ include "penstock.nats" . }}
{{- else -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.broker.urlsSecret | required "broker.urlsSecret: name the Secret with the URLs of your NATS, or set nats.enabled" }}
      key: {{ .user }}
      {{- if eq .user "sys" }}
      optional: true
      {{- end }}
{{- end -}}
{{- end }}

{{/* The token for the Hugging Face hub, if there is one. */}}
{{- define "penstock.hub" -}}
{{- if or .Values.hub.existingSecret .Values.hub.token }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.hub.existingSecret | default (printf "%s-hub" .Release.Name) }}, key: token}}
{{- end }}
{{- end }}

{{- define "penstock.confined" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What a pod may be given by the values, and what every pod has. */}}
{{- define "penstock.pod" -}}
# A Service called penstock-nats would give every pod a variable PENSTOCK_NATS_PORT, which is a flag of ours.
enableServiceLinks: false
automountServiceAccountToken: {{ .serviceAccount | default "" | empty | not }}
{{- with .serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
# What is fetched from the hub is written to the shared volume by the image's user.
securityContext:
  {runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch}
{{- with .spec.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "penstock.podMeta" -}}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
  {{- with .spec.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .spec.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The volumes of a process: of its root file system it writes nothing else. */}}
{{- define "penstock.scratch" -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
{{- end }}
{{- define "penstock.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/penstock}
{{- end }}

{{- define "penstock.models" -}}
- name: models
  {{- if .Values.models.enabled }}
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim | default (printf "%s-models" .Release.Name) }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{- define "penstock.ownName" -}}
- {name: PENSTOCK_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: HOME, value: /home/penstock}
{{- end }}
