"""The demo: a small GPT trained on real text, once with flashtile and once with PyTorch's own attention."""
