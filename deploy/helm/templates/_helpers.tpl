{{- define "tinkex.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "tinkex.labels" -}}
app.kubernetes.io/name: tinkex
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "tinkex.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Environment of every tinkex container. */}}
{{- define "tinkex.env" -}}
envFrom:
  - secretRef:
      name: {{ .Values.existingSecret }}
env:
  - name: TINKEX_BLOBS
    value: {{ required "set blobs to the URL of the object store, e.g. s3://bucket/prefix" .Values.blobs | quote }}
  - name: TINKEX_MODELS
    value: {{ join "," .Values.models | quote }}
  {{- range $name, $value := .Values.env }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
{{- end -}}

{{/* Security context, image and mounts of every tinkex container. */}}
{{- define "tinkex.container" -}}
image: {{ include "tinkex.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: home
    mountPath: /var/lib/tinkex
  {{- if .Values.modelsVolume }}
  - name: models
    mountPath: /models
    readOnly: true
  {{- end }}
{{- end -}}

{{/* Fields of every pod. */}}
{{- define "tinkex.pod" -}}
# Variables of services would be taken for settings of tinkex.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: home
    {{- toYaml .Values.homeVolume | nindent 4 }}
  {{- with .Values.modelsVolume }}
  - name: models
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "tinkex.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
