const link = document.createElement("a");
link.href = URL.createObjectURL(new Blob([config.tags[0]], {type: "application/toml"}));
link.download = name;
link.click();
URL.revokeObjectURL(link.href);
