"""What ranks say to each other: meeting, meshes, collectives, compression, records."""
