"""PromptSpec -> Group: the engine protocol and the local engine."""
