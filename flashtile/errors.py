"""The two errors that flashtile raises on purpose."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral


class InvalidProblem(ValueError):
    """The request has no meaning: the message names the thing, its value, and what it must be."""


class NotSupported(NotImplementedError):
    """The request has a meaning, but no backend can run it; `reasons` says why, backend by backend."""

    def __init__(self, request: str, reasons: Mapping[str, Sequence[str]]):
        self.request = request
        self.reasons = {name: tuple(lines) for name, lines in reasons.items()}
        rows = [f"  {name}: {line}" for name, lines in self.reasons.items() for line in lines]
        self.args = ("\n".join([f"no backend can run {request}:", *rows]),)  # torch.compile traces no super().__init__ of these

    def __reduce__(self) -> tuple[type[NotSupported], tuple[str, Mapping[str, Sequence[str]]]]:
        """For processes that compile: one error passes to another process whole."""
        return type(self), (self.request, self.reasons)


def renamed(error: InvalidProblem, called: Mapping[str, str]) -> InvalidProblem:
    """The error with the names that its caller has for things, by those that it was raised with."""
    return InvalidProblem(re.sub(r"\w+", lambda word: called.get(word[0], word[0]), str(error)))


def check_sizes(**sizes: object) -> None:
    """Raise InvalidProblem for what is no positive int."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise InvalidProblem(f"{name} is {size!r}; it must be a positive int.")


# What others call arguments of `attention`: ours, and how it is said here.
_OTHERS = {
    "is_causal": ("causal", "causal"),
    "attn_mask": ("mask", "mask=Stored(attn_mask), True where a query sees a key, or score=Bias(attn_mask), which is added"),
    "attn_bias": ("score", "score=Bias(attn_bias)"),
    "key_padding_mask": ("mask", "mask=KeyPadding(keep), True for a key that counts"),
    "block_mask": ("mask", "mask=Blocks.from_flex(block_mask)"),
    "score_mod": ("score", "score=.., a modifier, or flashtile.compat.flex.flex_attention"),
    "softcap": ("score", "score=Softcap(cap)"),
    "alibi_slopes": ("score", "score=Alibi(slopes)"),
    "dropout_p": ("dropout", "dropout=Dropout(p)"),
    "softmax_scale": ("scale", "scale"),
    "window_size": ("window", "window=(left, right), None for unbounded"),
    "sinks": ("sink", "sink"),
    "return_softmax_lse": ("return_lse", "return_lse"),
    "return_attn_probs": ("return_lse", "return_lse; probabilities are not kept"),
    "deterministic": ("options", "options=Options(deterministic=True)"),
    "backend": ("options", "options=Options(backend=..)"),
    "precision": ("options", 'options=Options(precision="ieee")'),
    "cache_seqlens": ("seqused_k", "seqused_k"),
    "cu_seqlens_q": ("seqused_q", "attention_varlen"),
    "query": ("q", "q"), "key": ("k", "k"), "value": ("v", "v"),
    "embed_dim": ("width", "width"), "num_heads": ("heads", "heads"), "num_heads_kv": ("heads_kv", "heads_kv"),
}  # fmt: skip
_ALIKE = {
    "attention_mask": "attn_mask", "bias": "attn_bias", "padding_mask": "key_padding_mask", "logits_soft_cap": "softcap",
    "dropout": "dropout_p", "p": "dropout_p", "sm_scale": "softmax_scale", "scaling": "softmax_scale",
    "sliding_window": "window_size", "local_window_size": "window_size", "learnable_sink": "sinks", "s_aux": "sinks",
    "return_aux": "return_softmax_lse", "need_weights": "return_attn_probs", "cu_seqlens": "cu_seqlens_q",
    "num_kv_heads": "num_heads_kv", "kv_heads": "num_heads_kv", "d_model": "embed_dim", "hidden_size": "embed_dim",
    "block_table": "page_table", "block_tables": "page_table",
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_heads_kv",
}  # fmt: skip
_NEEDLESS = {
    "enable_gqa": "k and v may have fewer heads than q as they are",
    "batch_first": "the batch comes first, always",
    "pack_gqa": "it is chosen here", "num_splits": "keys are not split",
}  # fmt: skip


def check_names(function: str, given: Iterable[str], known: Collection[str], beside: Collection[str] = ()) -> None:
    """Raise TypeError, as Python does, for a keyword argument that the public function does not take; with what it may mean.

    beside: names of arguments that are not among `given`, because the function has them by themselves.
    """
    names = (*known, *beside)
    for name in given:
        if name in known:
            continue
        hint, other = "", name if name in _OTHERS else _ALIKE.get(name, "")
        ours, said = (other, other) if other in names else _OTHERS.get(other, ("", ""))
        if name in _NEEDLESS:
            hint = f"; leave it out: {_NEEDLESS[name]}"
        elif ours in names:
            hint = f"; did you mean {said}?"
        else:
            for near in names:
                if len(set(near) ^ set(name)) <= 1 and abs(len(near) - len(name)) <= 2:  # difflib is more than dynamo can trace
                    hint = f"; did you mean {near}?"
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
