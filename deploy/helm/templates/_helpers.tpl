{{- define "headroom.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "headroom.fullname" -}}
{{- $name := include "headroom.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Selectors can't be changed: these labels are the same in all versions. */}}
{{- define "headroom.selector" -}}
app.kubernetes.io/name: headroom
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "headroom.labels" -}}
{{ include "headroom.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: headroom
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "headroom.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "headroom.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "headroom.nodes" -}}
{{ merge (dict) (. | default dict) (dict "kubernetes.io/os" "linux") | toYaml }}
{{- end }}

{{- define "headroom.ownEtcd" -}}
{{- if not .Values.etcd.endpoints }}true{{ end }}
{{- end }}

{{/* Pods of a StatefulSet have a label of its name and a hash: with a longer name, none can be made. */}}
{{- define "headroom.etcd" -}}
{{ printf "%s-etcd" (include "headroom.fullname" . | trunc 47 | trimSuffix "-") }}
{{- end }}

{{/* The members of this chart's etcd have names that each of them and all agents can resolve. */}}
{{- define "headroom.etcdNames" -}}
{{- $service := include "headroom.etcd" . -}}
{{- $names := list -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $names = append $names (printf "%s-%d.%s.%s.svc" $service $i $service $.Release.Namespace) -}}
{{- end -}}
{{ toJson $names }}
{{- end }}

{{- define "headroom.etcdEndpoints" -}}
{{- if include "headroom.ownEtcd" . -}}
{{- $urls := list -}}
{{- range include "headroom.etcdNames" . | fromJsonArray }}{{ $urls = append $urls (printf "https://%s:2379" .) }}{{ end -}}
{{ join "," $urls }}
{{- else -}}
{{ join "," .Values.etcd.endpoints }}
{{- end }}
{{- end }}

{{- define "headroom.etcdClientSecret" -}}
{{- if .Values.etcd.tlsSecret }}{{ .Values.etcd.tlsSecret }}{{ else if include "headroom.ownEtcd" . }}{{ include "headroom.etcd" . }}-client{{ end }}
{{- end }}
