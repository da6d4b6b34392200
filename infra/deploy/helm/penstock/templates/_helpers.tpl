{{/* Ports, paths and times that several templates share. */}}
{{- define "penstock.http" }}8000{{ end }}
{{- define "penstock.metrics" }}9090{{ end }}
{{- define "penstock.ssh" }}2222{{ end }}
{{/* The port of the release's own NATS. */}}
{{- define "penstock.nats" }}{{ (((.Values.nats).config).nats).port | default 4222 | int }}{{ end }}
{{/* Whether the release's own NATS speaks TLS; empty: no. */}}
{{- define "penstock.tls" -}}
{{- if and .Values.nats.enabled ((((.Values.nats).config).nats).tls).enabled -}}
{{- if not .Values.nats.config.nats.tls.secretName -}}
{{- fail (printf "nats.config.nats.tls.secretName: name the Secret with the servers' certificate (tls.crt, tls.key) for %s" (include "penstock.natsHost" .)) -}}
{{- end -}}
{{- if not .Values.broker.caSecret -}}
{{- fail "broker.caSecret: name the Secret whose ca.crt signs the certificate of nats.config.nats.tls" -}}
{{- end -}}
tls
{{- end -}}
{{- end }}
{{/* Fails where a certificate is to be verified or shown, and pods would connect without TLS. */}}
{{- define "penstock.encrypted" -}}
{{- $broker := .Values.broker -}}
{{- $needs := ternary "caSecret" (ternary "certSecrets" "" (gt (len $broker.certSecrets) 0)) (not (empty $broker.caSecret)) -}}
{{- if and $needs .Values.nats.enabled (not (include "penstock.tls" .)) -}}
{{- fail (printf "broker.%s: the NATS of the release has no TLS; set nats.config.nats.tls.enabled and secretName, or leave it out" $needs) -}}
{{- end -}}
{{- if and $needs (not .Values.nats.enabled) -}}
{{- range $url := splitList "," $broker.url -}}
{{- if and $url (not (hasPrefix "tls://" (trim $url))) -}}
{{- fail (printf "broker.%s: it is for TLS, and broker.url has %s; write tls://" $needs $url) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
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

{{/* The namespace of a cell: (dict "root" $ "cell" 0). */}}
{{- define "penstock.namespace" -}}
{{ .root.Values.namespace }}{{ if .cell }}-{{ .cell }}{{ end }}
{{- end }}
{{/* The name of what each cell has, in a cell: (dict "name" "router" "cell" 0). */}}
{{- define "penstock.inCell" -}}
{{ .name }}{{ if .cell }}-{{ .cell }}{{ end }}
{{- end }}

{{/* What all processes are told: (dict "root" $ "cell" 0). */}}
{{- define "penstock.common" -}}
- --namespace={{ include "penstock.namespace" . }}
- --log-format=json
- --log-level={{ .root.Values.logLevel }}
{{- end }}

{{/* Fails where there is not one Secret for each cell. */}}
{{- define "penstock.cellSecrets" -}}
{{- $cells := .Values.cells -}}
{{- $given := len $cells.urlsSecrets -}}
{{- if and $given (ne (add1 $given) (int $cells.count)) -}}
{{- fail (printf "cells.urlsSecrets: name one for each of the %d cells after the first; there are %d" (sub (int $cells.count) 1) $given) -}}
{{- end -}}
{{- if and $given (or .Values.nats.enabled (not .Values.broker.urlsSecret)) -}}
{{- fail "cells.urlsSecrets: they go with broker.urlsSecret, and nats.enabled: false" -}}
{{- end -}}
{{- end }}

{{/* What processes of the whole deployment are told of its cells, of which there may be one. */}}
{{- define "penstock.cells" -}}
{{- $cells := .Values.cells -}}
{{- if gt (int $cells.count) 1 }}
- --cells={{ int $cells.count }}
{{- end }}
{{- end }}
{{/* The same as variables, for a user of the brokers: (dict "root" $ "user" "gateway"). */}}
{{- define "penstock.cellUrls" -}}
{{- $urls := list -}}
{{- range $at, $secret := .root.Values.cells.urlsSecrets }}
{{- $name := printf "CELL_%d_URL" (add1 $at) }}
{{- $urls = append $urls (printf "$(%s)" $name) }}
- {name: {{ $name }}, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $.user }}}}}
{{- end }}
{{- with $urls }}
- {name: PENSTOCK_CELL_NATS_URLS, value: {{ join "," . | quote }}}
{{- end }}
{{- end }}

{{/* As the NATS chart names its Service, its StatefulSet and, with -js, its volumes. */}}
{{- define "penstock.natsName" -}}
{{- $name := .Values.nats.nameOverride | default "nats" -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{ .Values.nats.fullnameOverride | default $full | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "penstock.natsHost" -}}
{{ include "penstock.natsName" . }}.{{ .Release.Namespace }}
{{- end }}

{{/*
How a pod logs in to the broker as a user: (dict "root" $ "user" "gateway"), of a cell with "cell". A URL with the password, or a URL and files
(see penstock.login). The user sys has variables of its own.
*/}}
{{- define "penstock.url" -}}
{{- $broker := .root.Values.broker -}}
{{- include "penstock.encrypted" .root -}}
{{- include "penstock.cellSecrets" .root -}}
{{- $prefix := ternary "PENSTOCK_SYS_NATS_" "PENSTOCK_NATS_" (eq .user "sys") -}}
{{- if .root.Values.nats.enabled -}}
{{- $user := printf "%s%s" .user (ternary "-2" "" $broker.second) -}}
{{- $password := printf "%s_PASSWORD" (upper .user) -}}
- name: {{ $password }}
  valueFrom: {secretKeyRef: {name: {{ .root.Release.Name }}-broker, key: {{ $user }}}}
- name: {{ $prefix }}URL
  value: {{ include "penstock.tls" .root | default "nats" }}://{{ $user }}:$({{ $password }})@{{ include "penstock.natsHost" .root }}:{{ include "penstock.nats" .root }}
{{- else -}}
{{- $files := or $broker.credsSecret $broker.nkeysSecret $broker.certSecrets -}}
{{- if and $broker.url $broker.urlsSecret }}{{ fail "broker: url and urlsSecret exclude each other" }}{{ end -}}
{{- if and $broker.url (not $files) -}}
{{- fail "broker.url has no credentials: name credsSecret, nkeysSecret or certSecrets, or urlsSecret instead of url" -}}
{{- end -}}
- name: {{ $prefix }}URL
  {{- if $broker.url }}
  value: {{ $broker.url | quote }}
  {{- else }}
  valueFrom:
    secretKeyRef:
      {{- if and .cell .root.Values.cells.urlsSecrets }}
      name: {{ index .root.Values.cells.urlsSecrets (sub (int .cell) 1 | int) }}
      {{- else }}
      name: {{ $broker.urlsSecret | required "broker.urlsSecret: name the Secret with the URLs of your NATS, or set broker.url or nats.enabled" }}
      {{- end }}
      key: {{ .user }}
      {{- if eq .user "sys" }}
      optional: true
      {{- end }}
  {{- end }}
{{- end }}
{{- if and $broker.credsSecret $broker.nkeysSecret }}{{ fail "broker: credsSecret and nkeysSecret exclude each other" }}{{ end }}
{{- if and $broker.caSecret (ne .user "sys") }}
- {name: PENSTOCK_NATS_CA, value: /etc/penstock/nats/ca/ca.crt}
{{- end }}
{{- if $broker.credsSecret }}
- {name: {{ $prefix }}CREDS, value: /etc/penstock/nats/{{ .user }}/creds}
{{- else if $broker.nkeysSecret }}
- {name: {{ $prefix }}NKEY, value: /etc/penstock/nats/{{ .user }}/nkey}
{{- end }}
{{- if $broker.certSecrets }}
- {name: {{ $prefix }}CERT, value: /etc/penstock/nats/{{ .user }}/tls.crt}
- {name: {{ $prefix }}KEY, value: /etc/penstock/nats/{{ .user }}/tls.key}
{{- end }}
{{- end }}

{{/* The volumes with what a pod needs to log in: (dict "root" $ "users" (list "router" "sys")); empty: none. */}}
{{- define "penstock.login" -}}
{{- $broker := .root.Values.broker -}}
{{- if $broker.caSecret }}
- {name: nats-ca, secret: {secretName: {{ $broker.caSecret }}, items: [{key: ca.crt, path: ca.crt}]}}
{{- end }}
{{- range $user := .users }}
{{- if or $broker.credsSecret $broker.nkeysSecret $broker.certSecrets }}
# of this user alone, for what the other ones may do is not this pod's
- name: nats-{{ $user }}
  projected:
    defaultMode: 0440
    sources:
      {{- if $broker.credsSecret }}
      - secret: {name: {{ $broker.credsSecret }}, items: [{key: {{ $user }}, path: creds}]}
      {{- else if $broker.nkeysSecret }}
      - secret: {name: {{ $broker.nkeysSecret }}, items: [{key: {{ $user }}, path: nkey}]}
      {{- end }}
      {{- if $broker.certSecrets }}
      - secret: {name: {{ get $broker.certSecrets $user | required (printf "broker.certSecrets.%s: name the Secret with this user's certificate" $user) }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- define "penstock.loginMounts" -}}
{{- $broker := .root.Values.broker -}}
{{- if $broker.caSecret }}
- {name: nats-ca, mountPath: /etc/penstock/nats/ca, readOnly: true}
{{- end }}
{{- if or $broker.credsSecret $broker.nkeysSecret $broker.certSecrets }}
{{- range .users }}
- {name: nats-{{ . }}, mountPath: /etc/penstock/nats/{{ . }}, readOnly: true}
{{- end }}
{{- end }}
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
