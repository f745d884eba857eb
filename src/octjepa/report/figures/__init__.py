"""The pictures of the page, each made from what was read: SVG text with greyscale PNG inside, no files, no network."""
