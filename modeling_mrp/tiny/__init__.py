"""The shipped tiny model: its synthetic task, tokenizer, backbone training and the command that rebuilds it."""
