"""What a plan says: sections, sentences, JSON and HTML."""
