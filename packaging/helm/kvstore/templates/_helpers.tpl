{{/* The name of everything here, and what the nodes' ids begin with. */}}
{{- define "kvstore.name" -}}
{{- if contains "." .Release.Name }}{{ fail (printf "want a release name without dots, which are in no node's id, got %s" .Release.Name) }}{{ end -}}
{{- .Release.Name -}}
{{- end -}}

{{- define "kvstore.selector" -}}
app.kubernetes.io/name: kvstore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvstore.labels" -}}
{{ include "kvstore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvstore.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end -}}

{{/* Of every container. */}}
{{- define "kvstore.confined" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end -}}

{{/* Of every pod. */}}
{{- define "kvstore.user" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* A volume shows a secret to the pod's whole group; a node wants its own to be nobody else's. */}}
{{- define "kvstore.secretOfItsOwn" -}}
- name: secret
  image: {{ include "kvstore.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [install, -m, "0600", /secret/cluster.secret, /run/kvstore/cluster.secret]
  securityContext: {{ include "kvstore.confined" . }}
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 32Mi}}
  volumeMounts:
    - {name: secret, mountPath: /secret, readOnly: true}
    - {name: run, mountPath: /run/kvstore}
{{- end -}}

{{- define "kvstore.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}
