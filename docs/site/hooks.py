"""What MkDocs cannot know of this repository: folders of pages,
and links to files that are no pages."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = [("Formats", "docs/format"), ("Decisions", "docs/decisions"),
           ("Measurements", "docs/measurements")]
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config):
    """Adds a section for each folder whose pages all belong to it."""
    for title, folder in FOLDERS:
        pages = sorted(path.name for path in (ROOT / folder).glob("*.md")
                       if path.name != "README.md")
        index = [f"{folder}/README.md"] if (ROOT / folder / "README.md").is_file() else []
        config.nav.append({title: index + [f"{folder}/{name}" for name in pages]})
    return config


def on_page_markdown(markdown, page, config, files):
    """A link to a file that is no page becomes its path; a link to nothing stays, and fails."""
    here = pathlib.PurePosixPath(page.file.src_uri).parent

    def shown(match):
        text, target, _ = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        path = (ROOT / here / target).resolve()
        inside = path.is_relative_to(ROOT) and path.exists()
        if inside and files.get_file_from_path(path.relative_to(ROOT).as_posix()) is None:
            return f"{text} (`{path.relative_to(ROOT).as_posix()}`)" if "`" not in text else text
        return match.group(0)

    return LINK.sub(shown, markdown)
