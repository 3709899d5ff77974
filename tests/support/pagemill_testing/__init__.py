"""What several tests share: stand-ins for the peers of a part, as strict as the real ones."""
