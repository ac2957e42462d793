"""What DOES happen: the trainer loop and its run folder."""
