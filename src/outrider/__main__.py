"""The command `outrider`, and `python -m outrider` where its script is not on the path."""


def main() -> None:
    try:
        from .cli.main import main as command
    except KeyboardInterrupt:  # while the first modules are imported
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
