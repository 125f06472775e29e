"""Encoders of pictures, sounds and texts. `KINDS` names the modules that
`model.aligner.encoders.*.kind` may choose."""

KINDS = (
    "audio_cnn",
    "cnn14",
    "efficientnet_lite0",
    "huggingface",
    "minilm",
    "mobilenet_v4",
    "text_bytes",
    "vit",
)
