"""`python -m modeling_mrp.train`, the same as the command `mrp-train`; also what torchrun and accelerate start."""

from .training.cli import main

if __name__ == "__main__":
    main()
