"""A callback of your own: it logs where a caption's token is looked at.

composer benchmark.py 'callbacks=["tests/examples/my_callbacks.py:LogAttention(every=2)"]' loggers.tensorboard.log_dir=null
"""

from composer import Callback

SIDE = 8  # pixels of the image for one of the attention's


class LogAttention(Callback):
    """Log the cross-attention of the batch's first image to one token, the mean over heads, as an image and a figure."""

    def __init__(self, layer="up_blocks.1.attentions.2.transformer_blocks.0.attn2", token=1, every=100):
        self.layer, self.token, self.every = layer, token, every
        self.parts = {}

    def fit_start(self, state, logger):
        attention = getattr(state.model, "module", state.model).denoiser.get_submodule(self.layer)
        self.num_heads = attention.heads
        attention.to_q.register_forward_hook(lambda _, given, query: self.parts.update(query=query.detach()))
        attention.to_k.register_forward_hook(lambda _, given, key: self.parts.update(key=key.detach()))

    def batch_end(self, state, logger):
        if state.timestamp.batch.value % self.every:
            return
        query, key = (self.parts[name][0].unflatten(-1, (self.num_heads, -1)).float() for name in ("query", "key"))
        scores = (query.transpose(0, 1) @ key.permute(1, 2, 0)) / query.shape[-1] ** 0.5  # (heads, pixels, tokens)
        seen = scores.softmax(dim=-1)[:, :, self.token].mean(dim=0)  # (pixels,)
        side = int(len(seen) ** 0.5)
        image = (seen / seen.max()).reshape(side, side).repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
        logger.log_images(image[:, :, None].cpu().numpy(), name="user/attention", channels_last=True)
        logger.log_metrics({"user/attention_max": float(seen.max())})
