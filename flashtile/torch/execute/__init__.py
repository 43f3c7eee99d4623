"""Running plans on tensors: buffers, launches, graphs."""
