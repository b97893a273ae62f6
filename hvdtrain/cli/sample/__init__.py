"""hvdtrain sample: sequences that a language model continues, as a picture or as text."""
