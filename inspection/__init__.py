"""Reading sessions: what was said, tried and found, as values; nothing here measures or writes."""
