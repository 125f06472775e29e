"""Encoders of pictures, sounds and texts. `KINDS` names the modules that `model.aligner.encoders.*.kind` may choose."""

KINDS = ("audio_cnn", "efficientnet_lite0", "huggingface", "minilm", "text_bytes", "vit")
