"""Mochi's attention over video and text with a mask, so that its step has one shape whatever the captions are.

diffusers' own takes each sample's words out by their places: as many graphs as lengths of captions, and no trace of a step
without its numbers. Here a mask hides the padding. Where there are words the results are the same; padding, which nothing
reads, has others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class MaskedMochiAttention:
    """Takes the place of diffusers' MochiAttnProcessor2_0."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """# (B, S, D) of video, (B, L, E) of text, (B, L) bool -> (B, S, D), (B, L, E)."""

        def heads(states: Tensor) -> Tensor:  # (B, S, heads x d) -> (B, S, heads, d)
            return states.unflatten(2, (attn.heads, -1))

        queries, keys = attn.norm_q(heads(attn.to_q(hidden_states))), attn.norm_k(heads(attn.to_k(hidden_states)))
        if image_rotary_emb is not None:
            queries, keys = rotated(queries, *image_rotary_emb), rotated(keys, *image_rotary_emb)
        of_text = encoder_hidden_states
        text_queries = attn.norm_added_q(heads(attn.add_q_proj(of_text)))
        text_keys = attn.norm_added_k(heads(attn.add_k_proj(of_text)))
        values, text_values = heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(of_text))
        pairs = ((queries, text_queries), (keys, text_keys), (values, text_values))
        query, key, value = (torch.cat(pair, dim=1).transpose(1, 2) for pair in pairs)
        num_places = hidden_states.shape[1]
        seen = F.pad(attention_mask.bool(), (num_places, 0), value=True)[:, None, None]  # (B, 1, 1, S + L)
        states = F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2, 3)
        video, text = states.split((num_places, of_text.shape[1]), dim=1)
        video = attn.to_out[1](attn.to_out[0](video))
        return video, (attn.to_add_out(text) if hasattr(attn, "to_add_out") else text)


def rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """# (B, S, heads, d), (S, heads, d / 2) each -> (B, S, heads, d): turn each pair of neighbours by its angle."""
    even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
    return turned.flatten(-2).to(states.dtype)
