"""A model of your own: a DiT on SD2's latents and text states, trained as a flow.

composer benchmark.py model.family=tests/examples/my_dit.py:MyDiT model.preset=tiny image_size=64 data.synthetic=true
"""

from diffusers.models import PixArtTransformer2DModel

from families import sd2


class MyDiT(sd2.SD2):
    """Everything but the trained network is SD2's. `preset`: full or tiny."""

    name, predictions, pipeline = "my_dit", ("flow",), None  # diffusers has no pipeline of these parts

    def __init__(self, preset, variant):
        objective = {"prediction": "flow", "timesteps": "logit_normal", "shift": 1.0, "caption_dropout": 0.1}
        super().__init__(sd2.ARCHITECTURES["stock"][preset], variant, objective)
        self.hub_name = sd2.ON_HUB["stock"] if preset == "full" else None  # the encoders for real data
        self.num_heads, self.num_layers = (16, 24) if preset == "full" else (2, 2)

    def build_denoiser(self):
        return PixArtTransformer2DModel(
            num_attention_heads=self.num_heads,
            attention_head_dim=72,
            num_layers=self.num_layers,
            cross_attention_dim=72 * self.num_heads,
            caption_channels=self.text_width,
            out_channels=4,
            sample_size=64,  # of the position embedding; other sizes are interpolated
        )

    def denoise(self, denoiser, noisy, times, condition):  # (B, 4, h, w), (B,) in [0, 1] -> (B, 4, h, w)
        no_sizes = {"resolution": None, "aspect_ratio": None}
        return denoiser(noisy, condition["text"], 1000.0 * times, no_sizes, return_dict=False)[0]
