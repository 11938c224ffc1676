"""The tables of docs/recipes.md: every key of a section of the recipe schema."""

from megacpp_mcore.recipe.notes import described, facts
from megacpp_mcore.recipe.schema import SECTIONS


def section(words: str) -> str:
    """Every section with its keys. words: none."""
    if words:
        raise ValueError("it takes no words")
    known = facts()
    return "\n\n".join(
        f"### [{name}]\n\n{described(cls)}\n\n{_table(name, known)}"
        for name, cls in SECTIONS.items()
    )


def _table(name: str, known: list) -> str:
    lines = ["| key | takes | default | goes to | note |", "|---|---|---|---|---|"]
    for fact in known:
        section, _, key = fact.key.partition(".")
        if section == name:
            default = "required" if fact.required else fact.default and f"`{fact.default}`"
            flag, where, rest = fact.goes_to.partition(" where ")
            goes = f"`{flag}`{where}{rest}" if flag.startswith("--") else fact.goes_to
            cells = [f"`{key}`", fact.takes, default, goes, fact.note]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
