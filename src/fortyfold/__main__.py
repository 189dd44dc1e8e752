"""`python -m fortyfold` is the command `fortyfold`."""

from fortyfold.cli.main import main

if __name__ == "__main__":
    main()
