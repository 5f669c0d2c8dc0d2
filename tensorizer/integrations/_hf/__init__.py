"""Finds, loads and saves objects of the Hugging Face libraries, for tensorizer.integrations.huggingface."""
