"""Who holds the weights: the verbs an engine knows, and the engines that know them."""
