"""What messages and folders of this room have in common; workers of a cluster read it before anything heavy is loaded."""

GO_ON = "What is done stays; the same command resumes from there"


def part_name(number: int) -> str:
    """Return the name of a part, which is its folder's."""
    return f"part-{number:05d}"
