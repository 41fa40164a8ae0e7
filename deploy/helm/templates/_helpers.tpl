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
app.kubernetes.io/instance: {{ .Release.Name }}
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
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "headroom.ownEtcd" -}}
{{- if not .Values.etcd.endpoints }}true{{ end }}
{{- end }}

{{/* The members of this chart's etcd have names that each of them and all agents can resolve. */}}
{{- define "headroom.etcdNames" -}}
{{- $service := printf "%s-etcd" (include "headroom.fullname" .) -}}
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
{{- if include "headroom.ownEtcd" . }}{{ include "headroom.fullname" . }}-etcd-client{{ else }}{{ .Values.etcd.tlsSecret }}{{ end }}
{{- end }}
