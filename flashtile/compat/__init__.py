"""Names and signatures of other libraries, translated; nothing is computed here."""
