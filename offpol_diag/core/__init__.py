"""The core: what presets do to tokens, one text for arrays of numpy and tensors of torch."""
