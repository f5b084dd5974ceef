"""One SGLang server: its arguments by version, its life, its words, its death."""
