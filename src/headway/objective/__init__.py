"""The former name of `headway.tasks`, kept for one release. Plug-ins import from `headway.plugin`."""
