"""What is computed: problems, masks, score modifiers. Standard library only."""
