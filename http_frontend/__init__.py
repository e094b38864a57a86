"""The HTTP frontend: OpenAI's API and POST /generation over the broker. No torch, no tokenizer."""
