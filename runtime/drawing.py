"""Graphs as Mermaid flowcharts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from keepstep.runtime.routing import END, START

if TYPE_CHECKING:
    from keepstep.runtime.compiled import CompiledGraph

_PLAIN_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Words that mean something in a flowchart; `end` as an id breaks it.
_WORDS = {"call", "class", "classdef", "click", "default", "direction", "end", "flowchart", "graph", "href"}
_WORDS |= {"linkstyle", "style", "subgraph"}


def mermaid(graph: CompiledGraph) -> str:
    """Return a graph as a Mermaid flowchart, one line each for nodes and edges, in the order of declaration."""
    return "\n".join(["flowchart TD", *_lines(graph, "", "    ", set())]) + "\n"


def _lines(graph: CompiledGraph, prefix: str, indent: str, taken: set[str]) -> list[str]:
    ids = {name: _id(prefix + name, taken) for name in (START, *graph.nodes, END)}
    lines = [f"{indent}{ids[START]}([START])"]
    for name, node in graph.nodes.items():
        if node.subgraph is None:
            lines.append(f'{indent}{ids[name]}["{_text(name)}"]')
            continue
        lines.append(f'{indent}subgraph {ids[name]}["{_text(name)}"]')
        lines.extend(_lines(node.subgraph, f"{prefix}{name}__", indent + "    ", taken))
        lines.append(f"{indent}end")
    lines.append(f"{indent}{ids[END]}([END])")
    return [*lines, *(indent + edge for edge in _edges(graph, ids))]


def _edges(graph: CompiledGraph, ids: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for name in (START, *graph.nodes):
        exits = graph.exits[name]
        lines.extend(f"{ids[name]} --> {ids[target]}" for target in exits.fixed)
        for route in exits.routes:
            arrow = f'-.->|"{_text(route.label)}"|' if route.label else "-.->"
            lines.extend(f"{ids[name]} {arrow} {ids[target]}" for target in route.to)
        goto = graph.nodes[name].goto if name != START else ()
        lines.extend(f'{ids[name]} -.->|"goto"| {ids[target]}' for target in goto)
        if not (exits.fixed or exits.routes or goto):
            lines.append(f"{ids[name]} --> {ids[END]}")
    return lines


def _id(name: str, taken: set[str]) -> str:
    """Return an id for a node: its name where Mermaid takes it and it is free, else a numbered one."""
    wanted = name if _PLAIN_ID.fullmatch(name) and name.lower() not in _WORDS else f"node_{len(taken)}"
    while wanted in taken:
        wanted += "_"
    taken.add(wanted)
    return wanted


def _text(name: str) -> str:
    """Return a text that means itself inside double quotes."""
    return name.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
