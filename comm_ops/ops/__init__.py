"""One record per communication op: schema, fake and eager kernel, adjoint and cost; `table` lists them all."""
