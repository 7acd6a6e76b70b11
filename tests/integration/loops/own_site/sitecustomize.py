"""A site's own customisation, as images and clusters have it: it must run with a tool's beside it."""

import builtins

builtins.site_greeting = "seen"
