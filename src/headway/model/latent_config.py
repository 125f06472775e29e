"""The `model.latent_attention` section: heads whose keys and values are made from one small vector per token. Imports without torch."""

from headway.config.section import Section, setting


class LatentAttentionConfig(Section):
    """Multi-head latent attention (MLA): a token's keys and values of all heads are projections of `kv_rank` channels, and its keys share
    `rope_head_dim` rotated channels. The cache stores these, whatever the number of heads."""

    kv_rank: int = setting(
        512, "Channels from which the keys and values of all heads are made (kv_lora_rank).", gt=0
    )
    q_rank: int | None = setting(
        None,
        "Channels from which the queries are made (q_lora_rank); null = from the stream itself.",
        gt=0,
    )
    nope_head_dim: int = setting(
        128, "Channels of a query or key head that are not rotated (qk_nope_head_dim).", gt=0
    )
    rope_head_dim: int = setting(
        64,
        "Channels of a query or key head that are rotated; heads share those of keys.",
        gt=0,
        multiple_of=2,
    )
    value_head_dim: int = setting(
        128, "Channels of a value head (v_head_dim); at most nope_head_dim + rope_head_dim.", gt=0
    )

    @property
    def head_size(self) -> int:
        """Channels of a query or key head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def stored_size(self) -> int:
        """Channels of a token that decoding needs, for all heads together."""
        return self.kv_rank + self.rope_head_dim
