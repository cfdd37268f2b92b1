"""What a model is: its units, and what each of their calls costs."""
