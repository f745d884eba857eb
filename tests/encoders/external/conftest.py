from published_layouts import layouts

__all__ = ["layouts"]
