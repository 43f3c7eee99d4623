"""The executor's GPU launches, without a GPU."""
