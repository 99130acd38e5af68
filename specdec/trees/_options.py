"""Checks of builder options."""


def require_positive(builder: str, **options: int | float | None) -> None:
    """Raises `ValueError` for the first option that is given but not above zero."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"{builder}({name}={value!r}): expected a number above 0.")
