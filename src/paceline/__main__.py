"""`python -m paceline`, and what torchrun starts with `-m paceline`."""

from paceline.cli import main

if __name__ == "__main__":
    main()
