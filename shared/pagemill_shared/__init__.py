"""What all processes agree on: messages, codec, numbering, channel, sampling, settings, logs, errors."""
