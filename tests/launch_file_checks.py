"""Read files of launch/ as their own tools do. Run by an interpreter that has these tools, and none of Easel's packages.

    VENV/clouds-.../bin/python tests/launch_file_checks.py <<< '[["sky", "TEXT"], ["jobset", "TEXT"], ["kubernetes", "TEXT"]]'

stdin: JSON, a list of (tool, text of a YAML). stdout: JSON, what the tool has against each, or null.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import yaml


@functools.cache
def tools() -> dict[str, Callable[[str], None]]:
    import kubernetes_validate
    import sky
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
    from sky.utils import common_utils, schemas

    def by_sky(text: str) -> None:
        """As `sky jobs launch` reads a file. Its client lets unknown keys of `job_recovery` pass, its server does not."""
        task = sky.Task.from_yaml_str(text)
        schema = schemas.get_resources_schema()
        schema["properties"]["job_recovery"]["anyOf"][1]["additionalProperties"] = False
        common_utils.validate_schema(yaml.safe_load(text)["resources"], schema, "resources: ")
        assert task.run and task.setup

    def by_jobset(text: str) -> None:
        """By JobSet's classes. They drop a key that they do not know: what they give back has to be all of it."""
        given = yaml.safe_load(text)
        kept = dict(leaves(JobsetV1alpha2JobSet.from_dict(given)))
        if lost := [f"{place}={value!r}" for place, value in leaves(given) if kept.get(place) != value]:
            raise ValueError(f"not of a JobSet: {', '.join(lost)}")

    def by_kubernetes(text: str) -> None:
        """The Job in a JobSet, by Kubernetes' own schemas; strict: an unknown key is refused."""
        [replicated] = yaml.safe_load(text)["spec"]["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, **replicated["template"]}
        kubernetes_validate.validate(job, "1.37", strict=True)

    return {"sky": by_sky, "jobset": by_jobset, "kubernetes": by_kubernetes}


def leaves(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`a.b.0.c`, value) for each value of nested maps and lists, and of objects of JobSet's classes."""
    content = content.to_dict() if hasattr(content, "to_dict") else content
    if isinstance(content, dict | list) and content:
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from leaves(value, f"{place}.{key}" if place else str(key))
    else:
        yield place, content


def problem(tool: str, text: str) -> str | None:
    try:
        tools()[tool](text)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    found = [problem(tool, text) for tool, text in json.load(sys.stdin)]
    print("\n" + json.dumps(found))
