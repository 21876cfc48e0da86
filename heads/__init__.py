"""Draft methods, one file each; importing this package registers them."""
