"""What a call's arguments mean: tensors, lengths, masks, dropout."""
