"""What a run takes before anything is loaded: sizes, cards, memory and seconds. Pure numbers, no torch."""
