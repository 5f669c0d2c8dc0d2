"""How objects of the Hugging Face libraries are found, loaded and saved, for tensorizer.integrations.huggingface."""
