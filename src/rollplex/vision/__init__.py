"""WHICH visual tokens the language model sees: video decoding and frame sampling."""
