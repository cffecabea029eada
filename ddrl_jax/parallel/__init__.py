"""How arrays and attention are laid out over devices: the mesh, the sharding rules, the attention forms."""
