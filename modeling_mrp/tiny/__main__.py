"""`python -m modeling_mrp.tiny build --out FOLDER`: rebuilds the shipped tiny model from nothing."""

from .build import main

main()
